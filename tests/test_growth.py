"""Nothing but the matmuls grows faster than it must (measure/growth.py). Each test counts, and none is timed."""

# -- newer_checkpoints

# -- open_files

# -- gloo

# -- store

# -- read_ahead

# -- hashing

# -- initial_weights

# -- metrics

# -- shuffle

# -- failure_report

# -- sharded_metadata

# -- buckets

# -- memory_of_saves

# -- loop_memory
