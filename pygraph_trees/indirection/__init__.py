"""Indirection: a recorded graph is given the addresses of its live inputs, their data is not copied.

A function is recorded with its live inputs at placeholder addresses (``placeholder``), ranges in which nothing else
ever lives, so that each word of the captured graph inside one is a place where the graph holds that input's address
(``relocations``). For each input that decides how a replay gets it: patched, or copied with a reason (``routes``).
Before a replay the addresses that changed are written into the instantiated graph (``patching``).

Where there is a table, the graph begins with a kernel that writes all addresses to slots (``table``), and Inductor's
Triton kernels are captured (``launches``, ``variant_launchers``) as variants that read them there (``variants``). It is
asked for, or chosen by a rule (``route_rule``) from samples of replays (``sampler``); then another process compiles the
variants (``variant_worker``, ``builds``).
"""
