"""Methods to compare with: Hessian-free, KFAC, SGD and Adam behind the same contract."""

from woodbury.rivals.first_order import SGD, Adam, FirstOrder
from woodbury.rivals.hessian_free import HessianFree
from woodbury.rivals.kfac import KFAC

__all__ = ["KFAC", "SGD", "Adam", "FirstOrder", "HessianFree"]
