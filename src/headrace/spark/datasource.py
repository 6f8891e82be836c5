"""`format("headrace")`: the data source that Spark loads."""

from collections.abc import MutableMapping

from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
)
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from headrace.model.errors import InvalidArgument
from headrace.spark.source.options import SourceOptions, source_options

_TYPES: dict[str, DataType] = {
    "topic": StringType(),
    "partition": IntegerType(),
    "offset": LongType(),
    "timestamp": TimestampType(),
    "key": BinaryType(),
    "value": BinaryType(),
    "headers": ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())])),
    "due": TimestampType(),
    "priority": IntegerType(),
    "expires": TimestampType(),
}


class HeadraceDataSource(DataSource):
    """Topics as tables."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(dict(options))

    @classmethod
    def name(cls) -> str:
        """Return the name for `format`."""
        return "headrace"

    def schema(self) -> StructType | str:
        """Return the schema for the options."""
        options = source_options(self.options)
        if options.view:
            from headrace.spark.sql.subscription_views import view_schema

            return view_schema(options)
        return table_schema(options)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the batch reader."""
        options = source_options(self.options)
        if options.view:
            from headrace.spark.sql.subscription_views import ViewReader

            return ViewReader(options, schema)
        from headrace.spark.source.reader import HeadraceReader

        return HeadraceReader(options, checked_schema(schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # Spark's names
        """Return the stream reader."""
        from headrace.spark.source.stream_reader import HeadraceStreamReader

        options = source_options(self.options)
        if options.view:
            raise InvalidArgument("a view is what a subscription is at one moment: read it as a batch")
        return HeadraceStreamReader(options, checked_schema(schema))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        """Return the batch writer."""
        from headrace.spark.sink.writer import HeadraceArrowWriter

        _check_append(overwrite)
        return HeadraceArrowWriter(self.options, schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        """Return the stream writer."""
        from headrace.spark.sink.writer import HeadraceStreamArrowWriter

        _check_append(overwrite)
        return HeadraceStreamArrowWriter(self.options, schema)


def table_schema(options: SourceOptions) -> StructType | str:
    """Return the schema of topics for the options; as DDL text if the user gave DDL for the value."""
    fields = [StructField(name, _TYPES[name]) for name in options.columns]
    if "value" not in options.columns or options.value_format == "bytes":
        return StructType(fields)
    at = options.columns.index("value")
    if options.value_format == "string":
        fields[at] = StructField("value", StringType())
        return StructType(fields)
    corrupt = StructField("_corrupt", StringType())
    if options.value_schema:
        words = [f"{field.name} {field.dataType.simpleString()}" for field in (*fields, corrupt)]
        words[at] = f"value struct<{options.value_schema}>"
        return ", ".join(words)
    from headrace.spark.source.json_values import inferred_type
    from headrace.spark.source.message_source import open_source
    from headrace.spark.source.sampling import sample

    source = open_source(options)
    try:
        fields[at] = StructField("value", inferred_type(sample(source, options)))
    finally:
        source.close()
    return StructType([*fields, corrupt])


def checked_schema(schema: StructType) -> StructType:
    """Check a schema, which may be the user's; raises InvalidArgument for unknown columns or types."""
    for field in schema.fields:
        kind = field.dataType
        allowed = kind == _TYPES.get(field.name)
        if field.name == "value":
            allowed = allowed or isinstance(kind, StructType | StringType)
        if field.name == "_corrupt":
            allowed = isinstance(kind, StringType)
        if not allowed:
            known = ", ".join(f"{name} {plain.simpleString()}" for name, plain in _TYPES.items())
            raise InvalidArgument(
                f"a topic has no column {field.name} of type {kind.simpleString()}; there are {known}. "
                'For JSON give option("value.format", "json") and option("value.schema", ...) rather than a schema'
            )
        if isinstance(kind, StructType):
            from headrace.spark.source.json_converters import converter_for

            converter_for(kind)  # raises for types that JSON cannot be converted to
    return schema


def _check_append(overwrite: bool) -> None:
    if overwrite:
        raise InvalidArgument('topics are only appended to: use mode("append")')
