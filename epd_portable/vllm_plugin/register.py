"""Entry point of the group ``vllm.general_plugins``."""

from __future__ import annotations


def register() -> None:
    """Prepare a process of vLLM; called in every one of them, any number of times.

    Imports nothing heavy: the classes of this package are found by the import paths that the
    launcher puts on an engine's command line.
    """
    from epd_portable import log
    from epd_portable.vllm_plugin import exposition

    log.survive_full_disks()
    log.configure()
    exposition.serve()
