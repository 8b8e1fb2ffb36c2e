"""What a step costs, measured with torch alone; figures from the measurements need matplotlib.

The CPU figures are medians of CPU time, taken in one process. Threads other than the one that computes would
spoil them, so the process must have been started with OMP_NUM_THREADS=1; if it was not, it starts itself again
that way.
"""
