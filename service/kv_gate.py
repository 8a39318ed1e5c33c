"""Shows on a server's metrics page what was last measured of a model's chunk reuse.

Whoever runs the model measures it (`kvcache.gate_keeper`) and keeps the verdict with its KV, in the
folder that the server warms from. So a server shows it without running a model.
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import Counter

from stoker.kvcache.chunk_gate import ChunkGate
from stoker.service.metrics import Metrics

Advance = Callable[[Counter, str, float], None]


def show_gate(metrics: Metrics, gate: ChunkGate, model_id: str, advance: Advance) -> None:
    """Bring the metrics of one model's gate up to date.

    Args:
        metrics: Where to.
        gate: Where verdicts are kept; read anew, since another process writes them.
        model_id: The model; its name is the label, and there is one a server.
        advance: Moves a counter to a total: (counter, the total's name, total).
    """
    record = gate.record_of(model_id)
    metrics.gate_open.labels(model_id).set(gate.allows(model_id))
    metrics.gate_measured.labels(model_id).set(record.measured_at_s)
    if record.report is not None:
        metrics.gate_divergence.labels(model_id).set(record.report.kl_mean)
        metrics.gate_agreement.labels(model_id).set(record.report.agreement)
        metrics.gate_loss_gain.labels(model_id).set(record.report.loss_gain_ratio)
    for outcome, total in (
        ("allowed", record.allowed),
        ("refused", record.refused),
        ("failed", record.failed),
    ):
        advance(
            metrics.gate_measurements.labels(model_id, outcome), f"gate {outcome}", float(total)
        )
