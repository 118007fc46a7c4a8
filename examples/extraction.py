"""Facts from a text as pydantic objects, by LangChain and by LlamaIndex: nested, with a list and an enum.

A grammar holds the model to the schema, so that any answer that is whole validates; what it says is another matter.
One that is cut short is an error, not a shorter list. Needs the `langchain`, `llama-index` and `structured` extras.
Runs offline with the bundled model; or give a model's name or folder:
python examples/extraction.py Qwen/Qwen2.5-7B-Instruct
"""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import Any

from langchain_core.exceptions import OutputParserException
from langchain_core.prompts import ChatPromptTemplate
from llama_index.core import PromptTemplate
from llama_index.llms.fly import FLyLLM
from pydantic import BaseModel, Field

from langchain_fly import ChatFLy

PROMPT = "Extract the place from this text as JSON:\n\n{text}"
TEXT = (
    "The Harbour Museum in Bergen opened in 1986. Its director is Ingrid Solberg. Tom Hale looks after the boats, and "
    "Mary Lind guides the visitors."
)


class Kind(StrEnum):
    """What kind of place it is."""

    MUSEUM = "museum"
    LIBRARY = "library"
    SCHOOL = "school"


class Person(BaseModel):
    """Somebody who works there."""

    name: str = Field(max_length=30)  # limits are kept as well, and keep a small model from going on for ever
    role: str = Field(max_length=30)


class Place(BaseModel):
    """A place that can be visited."""

    name: str = Field(max_length=40)
    kind: Kind
    opened: int = Field(ge=1000, le=2100, description="the year")
    people: list[Person] = Field(min_length=1, max_length=4)


def main(model: str | None = None, text: str = TEXT, *, max_tokens: int = 250) -> dict[str, Any]:
    # The bundled model is computed in float32, the fastest on most CPUs; for others, the checkpoint decides.
    settings = {"model": model, "dtype": "auto" if model else "float32", "max_tokens": max_tokens}
    llm, prompt = ChatFLy(**settings), ChatPromptTemplate.from_template(PROMPT)

    place = (prompt | llm.with_structured_output(Place)).invoke({"text": text})
    print(f"LangChain: {place!r}\n")

    # As a JSON schema, it is streamed as it grows: names and lists are not whole before the end.
    partial = []
    for fields in (prompt | llm.with_structured_output(Place.model_json_schema())).stream({"text": text}):
        print(f"  {fields}")
        partial.append(fields)

    error = None
    try:
        (prompt | llm.with_structured_output(Place, max_tokens=30)).invoke({"text": text})
    except OutputParserException as too_short:  # closing the brackets would give an object with people left out
        error = too_short
        print(f"\nLangChain, 30 tokens: {str(error).splitlines()[0]}")

    other = FLyLLM(**settings).structured_predict(Place, PromptTemplate(PROMPT), text=text)  # arguments of a call
    print(f"\nLlamaIndex: {other!r}")
    return {"langchain": place, "partial": partial, "error": error, "llama_index": other}


if __name__ == "__main__":
    main(*sys.argv[1:3])
