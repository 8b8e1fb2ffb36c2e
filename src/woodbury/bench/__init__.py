"""Measurements that need torch alone: `python -m woodbury.bench step`, `scale` and `peers`; `draw` draws them.

Figures are medians of CPU time, taken in one process. Threads other than the one that computes would spoil
CPU time, so the process must have been started with OMP_NUM_THREADS=1; if it was not, it starts itself again
that way.
"""
