"""What `millrace doctor` looks at: Redis, the workers, this machine and the model; each finding with its fix."""
