from __future__ import annotations

from epd_portable.scheduling.answers import WithheldAnswers


def test_answers_wait_for_their_step_and_come_in_the_order_of_steps() -> None:
    answers: WithheldAnswers[str] = WithheldAnswers()
    assert answers.pass_on(1, {0: ["a", "b"], 1: ["c"]}) == {}
    assert answers.pass_on(2, {0: ["d"]}) == {}
    answers.computed(1)
    assert answers.pass_on(3, {0: ["e"]}) == {0: ["a", "b"], 1: ["c"]}
    answers.computed(3)
    assert answers
    assert answers.pass_on(0, {}) == {0: ["d", "e"]}
    assert not answers


def test_what_is_computed_already_does_not_wait_and_older_news_changes_nothing() -> None:
    answers: WithheldAnswers[str] = WithheldAnswers()
    answers.computed(2)
    answers.computed(1)
    assert answers.pass_on(2, {3: ["a"]}) == {3: ["a"]}


def test_answers_about_nothing_computed_come_after_those_that_wait() -> None:
    answers: WithheldAnswers[str] = WithheldAnswers()
    assert answers.pass_on(0, {0: ["failed"]}) == {0: ["failed"]}
    assert answers.pass_on(1, {0: ["a"], 1: []}) == {}
    assert answers.pass_on(0, {0: ["failed"]}) == {}
    answers.computed(1)
    assert answers.pass_on(0, {}) == {0: ["a", "failed"]}
