"""The only room that imports transformers' model side: loading, compatibility, caches and the shared registry."""
