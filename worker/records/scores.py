"""Builds the records of scores, rerankings and classes, in the form of vLLM's responses."""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul

from engine.request import RequestOutput
from worker.lines.request_line import RequestLine
from worker.lines.scoring import ClassifyBody, PairBody, RerankBody
from worker.records.record import FLOAT32_FORMAT, RecordContext

Vector = Sequence[float]


def scores_record(
    line: RequestLine, body: PairBody | ClassifyBody, output: RequestOutput, context: RecordContext
) -> dict[str, object]:
    """The result line of `line`: vLLM's ScoreResponse, RerankResponse or ClassificationResponse.

    Beyond vLLM: `prompt_tokens_details` of a usage, as in other records. A pair whose score is the cosine of two
    embeddings counts the tokens that were run, the query's once; vLLM counts them with each pair, and a token between.
    """
    if isinstance(body, ClassifyBody):
        response = _classes(line, output, context)
    elif isinstance(body, RerankBody):
        response = _ranking(line, body, output, context)
    else:
        data = [
            {"index": index, "object": "score", "score": score} for index, score in enumerate(pair_scores(body, output))
        ]
        response = _listed(f"score-{context.job_id}-{line.index}", data, output, context)
    return context.answered(line.index, line.custom_id, 200, response)


def pair_scores(body: PairBody, output: RequestOutput) -> list[float]:
    """One score a pair: that of a head's only class, or else the cosine of the two texts' embeddings."""
    if output.class_scores:
        return [_rounded(scores[0]) for scores in output.class_scores]
    number = len(body.sides[0][1])
    firsts, seconds = output.embeddings[:number], output.embeddings[number:]
    if number == 1:
        firsts *= len(seconds)
    return [_rounded(_cosine(*pair)) for pair in zip(firsts, seconds, strict=True)]


def _cosine(first: Vector, second: Vector) -> float:
    """Of vectors of length 1, as embeddings are."""
    return float(sum(map(mul, first, second)))


def _ranking(line: RequestLine, body: RerankBody, output: RequestOutput, context: RecordContext) -> dict[str, object]:
    """The best first; equal ones as the line has them."""
    ranked = sorted(enumerate(pair_scores(body, output)), key=lambda scored: scored[1], reverse=True)
    results = [
        {"index": index, "document": {"text": body.documents[index], "multi_modal": None}, "relevance_score": score}
        for index, score in ranked[: body.top_n or None]
    ]
    return {
        "id": f"rerank-{context.job_id}-{line.index}",
        "model": context.model_name,
        "usage": {"prompt_tokens": output.num_prompt_tokens, "total_tokens": output.num_prompt_tokens},
        "results": results,
    }


def _classes(line: RequestLine, output: RequestOutput, context: RecordContext) -> dict[str, object]:
    data = []
    for index, scores in enumerate(output.class_scores):
        best = max(range(len(scores)), key=scores.__getitem__)
        probs = list(map(_rounded, scores))
        data.append({"index": index, "label": context.labels[best], "probs": probs, "num_classes": len(probs)})
    return _listed(f"classify-{context.job_id}-{line.index}", data, output, context)


def _listed(
    response_id: str, data: Sequence[object], output: RequestOutput, context: RecordContext
) -> dict[str, object]:
    return {
        "id": response_id,
        "object": "list",
        "created": context.created_s,
        "model": context.model_name,
        "data": data,
        "usage": {
            "prompt_tokens": output.num_prompt_tokens,
            "completion_tokens": 0,
            "total_tokens": output.num_prompt_tokens,
            "prompt_tokens_details": {"cached_tokens": output.num_cached_tokens},
        },
    }


def _rounded(score: float) -> float:
    """With the digits of a float32, not those that it has as a double."""
    return float(format(score, FLOAT32_FORMAT))
