"""The sink: DataFrames into topics, in one transaction."""
