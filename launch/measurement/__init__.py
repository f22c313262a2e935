"""Measuring: several contestants in turns within one run, each loaded once in processes of its own.

A machine's speed drifts, with its neighbours and its temperature. So what is compared runs in turns, and a ratio is
the median of the rounds' ratios. A contestant that cannot run is a failure with its reason, and the others go on.

What runs in the environments of peers (`requests`, `serving`, `reader`, `peers`) needs Python alone at import.
"""
