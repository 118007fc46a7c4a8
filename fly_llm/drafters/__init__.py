"""Drafters: `start(request)` once per request, then `propose(committed, tentative, max_tokens)` every round."""
