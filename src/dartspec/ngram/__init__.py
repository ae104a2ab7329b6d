"""The n-gram index and what it is built from."""

from dartspec.ngram.index import NgramIndex

__all__ = ["NgramIndex"]
