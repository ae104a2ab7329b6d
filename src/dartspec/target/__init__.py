"""The target's side: loading, cache, masks, taps. With `text.py`, the only place that knows transformers."""
