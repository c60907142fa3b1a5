"""Spans of jobs, for OpenTelemetry: submit -> plan -> claim -> prefill, decode, record. Off by default."""
