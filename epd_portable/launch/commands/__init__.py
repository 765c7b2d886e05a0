"""Commands of `epd-launch` besides `up`, `plan` and `check`, and what commands share."""
