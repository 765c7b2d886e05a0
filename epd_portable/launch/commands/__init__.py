"""Commands of `epd-launch` beside `up`, `plan` and `check`, and what commands have in common."""
