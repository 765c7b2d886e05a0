"""The only package that imports vLLM: puts the project's parts in their places inside an engine."""
