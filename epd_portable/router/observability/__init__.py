"""What is told of requests: metrics, logs, traces, the status page."""
