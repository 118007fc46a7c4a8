"""Text in and out: messages become ids, committed ids become text again, and text decides when an answer ends."""
