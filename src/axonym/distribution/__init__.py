"""How operations are distributed: what a decision is (`decisions`), and who makes it (`policy`).

Nothing here knows arrays, meshes or JAX: a decision follows from names, sizes and mappings. So it is the same for the
code that carries it out, on Explicit mesh axes (`_output_sharding`, `ops/_contraction_plan`) and with FSDP parameters
(`_fsdp_ops`), and for the code that predicts it (`insight/_by_names`). On Auto mesh axes XLA decides, and
`tests/distribution` compares.
"""
