"""Measuring a server over HTTP as its clients meet it: `arctool bench serve`. Speaks to any OpenAI server; knows nothing of ours."""
