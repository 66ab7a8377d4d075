"""The account of a program: one case captured as eager runs it and as tilewright would, with every cost.

Nothing is computed: a capture ends as soon as its graphs are known.
"""

from tilewright.account.capture import Captured, capture
from tilewright.account.launches import operators_after
from tilewright.account.program import Account, account, tree_of

__all__ = ["Account", "Captured", "account", "capture", "operators_after", "tree_of"]
