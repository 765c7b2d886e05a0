from __future__ import annotations

import re

import pytest

from epd_portable import envs
from epd_portable.errors import ConfigError
from tests.kit.sources import modules, text


def test_every_variable_is_in_the_table_under_its_own_name() -> None:
    variables = {k: v for k, v in vars(envs).items() if isinstance(v, envs.Variable)}
    assert {variable.name for variable in envs.TABLE} == set(variables)
    assert all(name == variable.name for name, variable in variables.items())


def test_every_variable_that_the_package_reads_is_in_the_table() -> None:
    used = {name for path in modules() for name in re.findall(r"\bEPD_[A-Z_]+\b", text(path))}
    assert used <= {variable.name for variable in envs.TABLE}


@pytest.mark.parametrize("variable", envs.TABLE, ids=lambda variable: variable.name)
def test_an_unset_or_empty_variable_has_its_default(
    variable: envs.Variable[str] | envs.Variable[int | None],
) -> None:
    assert variable.get({}) == variable.get({variable.name: ""}) == variable.default


def test_a_value_is_parsed_and_a_wrong_one_is_named() -> None:
    assert envs.EPD_LOG_LEVEL.get({"EPD_LOG_LEVEL": "debug"}) == "DEBUG"
    with pytest.raises(ConfigError, match=r"EPD_LOG_LEVEL='loud': expected DEBUG"):
        envs.EPD_LOG_LEVEL.get({"EPD_LOG_LEVEL": "loud"})
