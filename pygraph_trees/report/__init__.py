"""Records of what happened to each compiled graph and function, and their views.

``log`` collects facts while graphs are compiled, recorded and replayed; ``records`` freezes them; ``text``, ``page``
and JSON show them. Reporting never makes a compilation or a call fail.
"""
