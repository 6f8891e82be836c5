"""The implementation of the commands that use Spark."""
