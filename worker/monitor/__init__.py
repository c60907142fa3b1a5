"""What an operator looks at: Flower here; Prometheus's rules and Grafana's dashboard beside it, as files."""
