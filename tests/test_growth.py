"""What grows with ranks, bytes, parameters and steps (measure/growth.py): counted, not timed."""

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
