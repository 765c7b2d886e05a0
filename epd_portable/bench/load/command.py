"""The command ``epd-bench load``."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import tempfile
from pathlib import Path
from typing import Any, cast

import click

from epd_portable.bench import chart, console, report
from epd_portable.bench.load import archive, charts, checkpoint, guard, peers, settings, show
from epd_portable.bench.load import report as load_report
from epd_portable.bench.load.measure import LoadResults, Measurement
from epd_portable.bench.load.plan import ROUNDS, Limits, LoadPlan, LoadPoint
from epd_portable.bench.load.requests import read_trace
from epd_portable.bench.load.sides import read_sides, with_proxy
from epd_portable.bench.load.stand import Ground
from epd_portable.errors import ConfigError, MeasurementError
from epd_portable.launch.commands.command_line import PlatformType

HELP = """Compare sides under load: a topology, replicas of plain vLLM, vLLM's own example.

\b
Sides, each as NAME=WHAT or WHAT; ratios are of the first by each of the others:
  ours=configs/1e1pd.yaml        a topology, started by epd-launch
  tcp=configs/1e1pd.yaml,transfer.path=tcp    the same with other keys
  replicas:2                     two replicas of plain vLLM; requests go to them in turns
  replicas:1                     one plain vLLM over all cores or devices
  dp:2                           one plain vLLM with --data-parallel-size 2
  upstream:1E1PD                 vLLM's own ECExampleConnector over /dev/shm, with a proxy
  replicas:2,tuned               on a CPU with the executor, threads and freedom of API servers that
                                 epd-launch gives its own instances; so dp:2 and upstream:1E1PD.
                                 Without it plain vLLM runs as it does by itself
  there=url:http://h:1,http://h:2    servers that run already; requests go to them in turns

\b
Three rates, with a picture in one of ten requests:
  epd-bench load --side ours=configs/1e1pd.yaml --side replicas:2 --side replicas:2,tuned \\
    --model shape --rate 2,6,10 --share 0.1 --pictures 1 --size 448 --json load.json
Several loads in one run:
  ... --point rate=6,share=0.1 --point rate=2,share=0.3,pictures=4
The highest rate at which 99 of 100 answers are within limits:
  ... --goodput 0.5:16 --ttft-ms 1000 --tpot-ms 50
Whether any ratio is worse than in a recorded run:
  ... --guard docs/measurements/2026-11-load/load.json
Resume a run that was interrupted:
  ... --json load.json --resume
The workload random-mm of `vllm bench serve`; one request at a time, with the stages of each:
  ... --preset random-mm --rate 1
  ... --preset one-by-one

Sides are measured in turns. Every side gets the same cores or devices and, in every round, the same
requests; the first of one round is the last of the next. The clients are a process of their own;
rounds in which they sent requests late are refused.

Exit status: 0; 1 when something failed, was refused, or fell back (see --allow-fallback); 2 on bad
input.
"""


@click.command("load", help=HELP)
@click.option(
    "--side",
    "side_texts",
    multiple=True,
    required=True,
    metavar="[NAME=]WHAT",
    help="What is measured, see above; may be repeated.",
)
@click.option(
    "--platform",
    type=PlatformType(),
    default="cpu",
    show_default=True,
    help="What all sides run on.",
)
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Set one key of the topology files, as in engine_args.max_model_len=8192; plain vLLM gets "
    "their engine_args and env. May be repeated.",
)
@click.option(
    "--model",
    help="Replaces the model of the topology files; 'shape' is one with random weights, made once "
    "and kept.",
)
@click.option(
    "--shape",
    default=checkpoint.DEFAULT_SHAPE,
    show_default=True,
    help="With --model shape: layers × width of its parts.",
)
@click.option(
    "--units",
    type=click.IntRange(min=1),
    show_default="one for each instance of the largest side",
    help="Cores (or devices) of each side, divided equally among its instances.",
)
@click.option(
    "--crowded",
    is_flag=True,
    help="Let all instances of a side share all its cores: counts are valid then, times are not.",
)
@click.option(
    "--up",
    type=click.Choice(["auto", "together", "turns"]),
    default="auto",
    show_default=True,
    help="together: all sides are up all the time; turns: each is started for each of its turns; "
    "auto: together where memory allows.",
)
@click.option(
    "--upstream-proxy",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="The proxy of vLLM's example, disagg_epd_proxy.py of its release; without it a stand-in "
    "is measured, and called so.",
)
@click.option(
    "--preset",
    type=click.Choice(list(settings.PRESETS)),
    help="Other defaults. random-mm: every request has 1, 2, 4 or 8 pictures; one-by-one: one "
    "client, pictures in half of 40 requests, --stages.",
)
@click.option(
    "--rate", "rates", metavar="N[,...]", help="Open loop: requests a second, as in 2,6,10."
)
@click.option(
    "--concurrency",
    multiple=True,
    type=click.IntRange(min=1),
    help="Closed loop: number of clients, each with one request at a time; may be repeated.",
)
@click.option(
    "--cv",
    default=1.0,
    show_default=True,
    help="Coefficient of variation of the times between arrivals: 1 is Poisson, more is bursty.",
)
@click.option(
    "--point",
    "point_texts",
    multiple=True,
    metavar="KEY=VALUE[,...]",
    help="One more load, which differs from the other options in these keys: rate, concurrency, "
    "cv, share, pictures (1/2), size (112/448), text, output, repeat, turns. May be repeated.",
)
@click.option(
    "--share", default=0.1, show_default=True, help="Part of the requests that have pictures."
)
@click.option(
    "--pictures",
    default="1",
    show_default=True,
    metavar="N[,...]",
    help="Pictures of such a request; of several numbers one at random.",
)
@click.option(
    "--size",
    default="448",
    show_default=True,
    metavar="PIXELS[,...]",
    help="Side of the pictures; of several one at random.",
)
@click.option(
    "--repeat",
    default=0.0,
    show_default=True,
    help="Part of the pictures that are drawn from a set of eight, and so come again.",
)
@click.option(
    "--turns",
    default=1,
    show_default=True,
    type=click.IntRange(min=1),
    help="Turns of a conversation: each is sent with all before it, and adds --text tokens.",
)
@click.option(
    "--picture-format",
    type=click.Choice(["png", "jpeg"]),
    default="jpeg",
    show_default=True,
    help="png: blocks of colour, small files; jpeg: noise, as in random-mm.",
)
@click.option("--text", default=400, show_default=True, help="Tokens of a prompt's text, about.")
@click.option("--output", default=150, show_default=True, help="Tokens of an answer, exactly.")
@click.option(
    "--replay",
    "replay_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Recorded traffic, one JSON object per line: time_s, text_tokens, output_tokens, and for "
    "pictures sizes and optionally seeds.",
)
@click.option(
    "--seconds",
    default=60.0,
    show_default=True,
    type=click.FloatRange(min=0.5),
    help="Open loop: seconds during which requests are sent, to each side in each round.",
)
@click.option(
    "--requests",
    default=100,
    show_default=True,
    type=click.IntRange(min=1),
    help="Closed loop: requests to each side in each round.",
)
@click.option(
    "--rounds",
    show_default="three, and more until 30 requests with pictures are behind each figure",
    type=click.IntRange(min=1),
    help="Times that every load is measured on every side.",
)
@click.option(
    "--warm-up",
    default=2,
    show_default=True,
    type=click.IntRange(min=0),
    help="Warm-up requests of each kind to each instance.",
)
@click.option("--seed", default=0, show_default=True, help="Seed of all random numbers.")
@click.option(
    "--ttft-ms", type=click.FloatRange(min=1), help="Limit of TTFT for goodput, in milliseconds."
)
@click.option(
    "--tpot-ms", type=click.FloatRange(min=0.1), help="Limit of TPOT for goodput, in milliseconds."
)
@click.option(
    "--goodput",
    "goodput_range",
    metavar="LOW:HIGH",
    help="Search these rates for the highest at which p99 of TTFT and TPOT are within limits; "
    "needs --ttft-ms, --tpot-ms or both.",
)
@click.option(
    "--precision",
    default=0.1,
    show_default=True,
    type=click.FloatRange(min=0.03, max=1),
    help="Precision of that search, as a part of the rate.",
)
@click.option(
    "--stages", is_flag=True, help="Show where time goes, by event traces of the topologies."
)
@click.option(
    "--allow-fallback", is_flag=True, help="Exit 0 even if items were not transferred as expected."
)
@click.option(
    "--timeout",
    "timeout_s",
    default=120.0,
    show_default=True,
    type=click.FloatRange(min=1),
    help="Longest time of a request, in seconds; later it counts as failed.",
)
@click.option(
    "--max-late-ms",
    default=50.0,
    show_default=True,
    type=click.FloatRange(min=0.1),
    help="Refuse rounds in which one in a hundred requests was sent later than this (ms).",
)
@click.option(
    "--guard",
    "guard_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="JSON of a recorded run: exit 1 if a ratio by the same side at the same load is worse, by "
    "more than --worse.",
)
@click.option(
    "--worse",
    default=1.5,
    show_default=True,
    type=click.FloatRange(min=1),
    help="With --guard: how many times the recorded ratio is still good.",
)
@click.option(
    "--resume",
    is_flag=True,
    help="Keep the finished rounds of the --json file, and measure the rest.",
)
@click.option("--plan", "plan_only", is_flag=True, help="Show what would be measured, and exit.")
@console.output_options
@click.pass_context
def load_command(context: click.Context, /, **options: Any) -> None:
    """Measure sides under load; users read `HELP`."""
    with console.stopping_at_sigterm():
        _run(_with_preset(context, options))


def _with_preset(context: click.Context, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options with a preset's values where none was given."""
    given = click.core.ParameterSource.COMMANDLINE
    preset = settings.PRESETS.get(options["preset"] or "", {})
    return options | {
        name: value
        for name, value in preset.items()
        if context.get_parameter_source(name) is not given
    }


def _run(options: dict[str, Any]) -> None:
    if options["png_file"] is not None:
        chart.require()
    if options["picture_format"] == "jpeg" and importlib.util.find_spec("PIL") is None:
        raise ConfigError(
            "pictures as JPEG need Pillow, which comes with an engine's environment: install it, "
            "or send --picture-format png"
        )
    json_file: Path | None = options["json_file"]
    if options["resume"] and json_file is None:
        raise ConfigError("--resume goes on with the rounds of a file: name it by --json")
    recorded = None
    if options["guard_file"] is not None:
        recorded = archive.read_page(options["guard_file"])["summary"]
    load_before = report.load_average()
    plan = _plan(options)
    progress = show.LoadBar()
    asked = settings.SidesAsked(
        sides=with_proxy(
            read_sides(options["side_texts"]), real=options["upstream_proxy"] is not None
        ),
        platform=options["platform"],
        settings=tuple(options["overrides"]),
        model=settings.find_model(
            options["model"], options["shape"], progress.say, make=not options["plan_only"]
        ),
        units=options["units"],
        crowded=options["crowded"],
    )
    found = settings.topologies(asked)
    allotment = settings.allot(asked, found)
    together = options["up"] == "together" or (
        options["up"] == "auto" and settings.fits_together(asked, allotment)
    )
    proxy: Path | None = options["upstream_proxy"]
    facts: dict[str, Any] = {
        "sides": {side.name: side.what for side in asked.sides},
        "platform": asked.platform,
        "model": options["shape"] if options["model"] == checkpoint.MODEL else options["model"],
        "settings": list(asked.settings),
        "units": allotment.units,
        "stages": options["stages"],
        "proxy": None if proxy is None else hashlib.sha256(proxy.read_bytes()).hexdigest(),
    }
    setting = load_report.Setting(
        plan=plan,
        sides=asked.sides,
        equal=f"{settings.equal_words(asked, allotment)} {peers.words(asked.sides, proxy)}",
        together=together,
        facts=facts,
        fingerprint=plan.fingerprint(**facts),
        command=console.command(),
        load_before=load_before,
    )
    if options["plan_only"]:
        click.echo(show.plan_text(setting, found))
        return
    progress.say(setting.equal)
    results = LoadResults()
    if options["resume"]:
        assert json_file is not None
        turns, words = archive.read_turns(json_file, setting.fingerprint)
        results = LoadResults(turns=turns, words_per_token=words or 0.0)

    def keep(results: LoadResults) -> None:
        if json_file is not None:
            report.write(
                load_report.make_report(results, setting), json_file=json_file, markdown_file=None
            )

    with tempfile.TemporaryDirectory(prefix="epd-bench-") as folder, progress:
        ground = Ground(
            platform=asked.platform,
            topologies=found,
            settings=asked.settings,
            model=asked.model,
            allotment=allotment,
            folder=Path(folder),
            stages=options["stages"],
            upstream_proxy=None if proxy is None else proxy.resolve(),
            report=progress.say,
        )
        Measurement(
            plan,
            asked.sides,
            ground,
            together=together,
            results=results,
            keep=keep,
            progress=progress,
        ).run()
    made = load_report.make_report(results, setting)
    console.finish(
        made,
        json_file=json_file,
        markdown_file=options["markdown_file"],
        png_file=options["png_file"],
        charts=charts.make_charts(results, setting),
    )
    for line in load_report.few_pictures(results, setting):
        progress.say(f"warning: {line}; give more --rounds or --seconds")
    _judge(results, setting, allow_fallback=options["allow_fallback"])
    if recorded is not None:
        worse = options["worse"]
        worsened = guard.regressions(cast("dict[str, Any]", made.summary), recorded, worse=worse)
        if worsened:
            raise MeasurementError(
                f"worse than recorded, more than {worse:g} times: {'; '.join(worsened)}"
            )
        progress.say(f"nothing is worse than {worse:g} times what {options['guard_file']} has")


def _plan(options: dict[str, Any]) -> LoadPlan:
    usual = settings.usual_point(
        share=options["share"],
        pictures=options["pictures"],
        size=options["size"],
        text=options["text"],
        output=options["output"],
        repeat=options["repeat"],
        turns=options["turns"],
        format=options["picture_format"],
        cv=options["cv"],
    )
    rates = options["rates"]
    points: list[LoadPoint] = []
    if rates:
        found = settings.read_numbers(rates, "--rate", float)
        points += [dataclasses.replace(usual, rate=rate) for rate in found]
    points += [dataclasses.replace(usual, concurrency=count) for count in options["concurrency"]]
    points += [settings.read_point(text, usual) for text in options["point_texts"]]
    search = None
    if options["goodput_range"]:
        search = settings.read_range(options["goodput_range"], options["precision"])
        if options["ttft_ms"] is None and options["tpot_ms"] is None:
            raise ConfigError("--goodput needs a limit: --ttft-ms, --tpot-ms or both")
        if any(point.rate or point.concurrency for point in points) or options["replay_file"]:
            raise ConfigError("--goodput looks for the rate itself: leave rates out of the points")
        if options["rounds"] is not None and options["rounds"] < ROUNDS:
            raise ConfigError(
                f"--goodput with --rounds {options['rounds']}: one round more or less decides "
                f"whether a rate is met; give {ROUNDS} or more, or leave --rounds out"
            )
    replay_file: Path | None = options["replay_file"]
    replay = read_trace(replay_file) if replay_file else ()
    if replay_file:
        points.append(dataclasses.replace(usual, replay=replay_file.name))
    points = points or [usual]
    settings.check_points(points, sought=search is not None)
    return LoadPlan(
        points=tuple(points),
        seconds=options["seconds"],
        requests=options["requests"],
        rounds=options["rounds"] or 0,
        warm_up=options["warm_up"],
        seed=options["seed"],
        limits=Limits(
            ttft_s=(options["ttft_ms"] or float("inf")) / 1000,
            tpot_s=(options["tpot_ms"] or float("inf")) / 1000,
        ),
        search=search,
        replay=replay,
        timeout_s=options["timeout_s"],
        max_late_s=options["max_late_ms"] / 1000,
        max_client_share=0.8,
    )


def _judge(results: LoadResults, setting: load_report.Setting, *, allow_fallback: bool) -> None:
    """Say by the exit status whether the figures are those of what was asked for.

    Raises:
        MeasurementError: They are not.
    """
    missing = [
        point
        for point in load_report.measured_points(results, setting)
        if len(results.good(point)) < setting.plan.rounds_of(point)
    ]
    if missing:
        raise MeasurementError(
            f"{len(results.refused())} turns were refused: {results.refused()[0]} "
            "(--resume measures them again)"
        )
    for side in setting.sides:
        problem = load_report.total_failure(results, side.name)
        if problem:
            raise MeasurementError(f"{side.name} answered nothing: {problem}")
    fell_back = load_report.fell_back(results, setting)
    if fell_back and not allow_fallback:
        raise MeasurementError(
            f"something fell back: {fell_back}; the figures are not those of the topology "
            "(--allow-fallback accepts them)"
        )
