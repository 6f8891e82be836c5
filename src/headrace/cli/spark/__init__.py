"""The parts of the commands that run on Spark."""
