-- Errors per service and minute, in SQL. Minutes are by the messages' own timestamps.
-- source: logs {"startingOffsets": "earliest", "value.format": "json", "value.schema": "service string, level string",
--   "watermark": "timestamp 2 minutes"}
-- sink: error-counts
-- trigger: 10 seconds

SELECT
  service AS key,
  to_json(named_struct(
    'start', window.start,
    'end', window.end,
    'service', service,
    'errors', count_if(level IN ('ERROR', 'FATAL')),
    'lines', count(*)
  )) AS value
FROM (SELECT timestamp, coalesce(value.service, 'unreadable') AS service, value.level FROM logs)
GROUP BY window(timestamp, '1 minute'), service
