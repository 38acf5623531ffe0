"""Decide how operations are distributed, and carry it out.

`policy` decides where the result of an operation lies, and what devices gather and add up. It sees no arrays: a
decision follows from names, sizes and mappings. So it is the same for the code that carries it out, on Explicit mesh
axes (`output_sharding`, `ops/contraction`) and with FSDP parameters (`fsdp_ops`), and for the code that predicts
it (`insight/_counted_exchanges`). On Auto mesh axes XLA decides, and `tests/distribution` compares.

`active_settings` keeps the mappings that are active, `mesh_axes` answers which mesh axes they and the arrays name, and
`per_device` runs a function on the shards of each device.
"""
