"""Rollout engines that differ from the trainer where the engine hf cannot."""

from transformers import AutoModelForCausalLM

from lib.rollout.hf_engine import HFEngine
from lib.rollout.weight_sync import CheckedStream


class CopyEngine(HFEngine):
    """HFEngine with a copy of the model. first_weights: another copy, which no sync changes."""

    shares_weights = False

    def __init__(self, model, tokenizer, **settings):
        super().__init__(model, tokenizer, **settings)
        path, self.dtype = model.config._name_or_path, settings["dtype"]
        self.model, self.first_weights = (AutoModelForCausalLM.from_pretrained(path, dtype=self.dtype) for _ in "ab")

    def load_weights(self, model, version: int) -> None:
        stream, own = CheckedStream(model, self.dtype), dict(self.model.named_parameters())
        for name, tensor in stream:
            own[name].data.copy_(tensor)
        self.version, self.checksum = version, stream.checksum


class ApartEngine(HFEngine):
    """HFEngine whose every seventh response has log-probs that are 1e-4 too low: far more than rounding, and too little
    to be noticed as an engine with other weights."""

    def generate(self, *args, **kwargs):
        out = super().generate(*args, **kwargs)
        out.batch["rollout_log_probs"][::7] -= 1e-4 * out.batch["response_mask"][::7]
        return out
