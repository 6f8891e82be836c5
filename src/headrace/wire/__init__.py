"""Sans-io codecs: bytes in, events out. Shared by clients and gateways."""
