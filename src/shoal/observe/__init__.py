"""Observability of running processes: status page, metrics, access and audit logs, traces, alert rules."""
