"""C++ for the CPU: kernels and shared-memory collectives behind a C interface, built once a machine.

`python -m tp.native.build` builds them; `tp.native.library` opens what was built. They know nothing of torch: they
take addresses, strides and sizes, so that one build serves every torch.
"""
