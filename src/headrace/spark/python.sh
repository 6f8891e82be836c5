#!/bin/sh
# The Python of Spark's processes on this machine: the driver's, with the pyspark that is installed for it. Spark puts an
# archive of the same modules before it, which holds no compiled code: to import them from there takes a second longer.
rest=$PYTHONPATH:
PYTHONPATH=
while [ -n "$rest" ]; do
    place=${rest%%:*}
    rest=${rest#*:}
    case $place in
        */python/lib/pyspark.zip | */python/lib/py4j-*-src.zip) ;;
        *) PYTHONPATH=$PYTHONPATH${PYTHONPATH:+:}$place ;;
    esac
done
export PYTHONPATH
# A process that has the modules loaded forks another in no time, if there is one.
if [ "$1" = -m ] && [ -S "$HEADRACE_SPARK_FORKS" ]; then
    exec "$HEADRACE_SPARK_PYTHON" -IS "${0%/*}/fork_client.py" "$@"
fi
exec "$HEADRACE_SPARK_PYTHON" "$@"
