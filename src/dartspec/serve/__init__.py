"""An OpenAI-compatible server for one model on one machine, and its page; see docs/serving.md.

Stands on the scheduler. FastAPI, uvicorn and pydantic are an extra (`dartspec[serve]`), imported by nothing else.
"""
