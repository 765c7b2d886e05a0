"""Processes of engines for tests, forked from one that has imported vLLM.

Every process of vLLM imports for ten seconds of a core before it does anything; tests start dozens.
Here one process imports, once, and never computes; the launcher, its routers and API servers, their
engine processes and workers are forked from it and then run what they would have run. To everybody
else they look like processes that were started: parents, sessions, signals, exit statuses, command
lines and environments under ``/proc`` are those of the real ones.

Not reproduced: variables that libraries read when they are imported (`BASE` sets the ones that
matter), libraries that vLLM preloads into processes that it spawns (tcmalloc), and kernels bound to
cores by OpenMP. ``tests/e2e/test_deployment.py`` starts its processes as users do.
"""
