"""dartspec: lossless speculative decoding with DART. Importing this package does nothing but define names."""

__version__ = "0.1.0"
