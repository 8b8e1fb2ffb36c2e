"""Nonlinear least squares: the Levenberg-Marquardt method as in MINPACK, for functions written in torch."""

from woodbury.least_squares.interface import LeastSquaresResult, least_squares

__all__ = ["LeastSquaresResult", "least_squares"]
