"""What running processes show and tell: status page, metrics, logs of access and audit, traces, alert rules."""
