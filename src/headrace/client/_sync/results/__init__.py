"""Results of jobs: publishing jobs that are answered, and waiting for their results."""
