"""The n-gram index and what it is built from."""

from dartspec.ngram.corpus import read_documents
from dartspec.ngram.index import NgramIndex

__all__ = ["NgramIndex", "read_documents"]
