"""A generation engine on transformers: requests that come together advance together, one token per forward pass.

Each response is drawn from a stream of its own, seeded by the prompt and how often it came, so that two jobs with the
same seed and weights generate the same text whatever the order in which requests arrive.
"""

import asyncio
import hashlib
import os

import torch
from dlc_sentinel.integrations.verl_dlc_topk import TOPK
from transformers import AutoModelForCausalLM
from verl.workers.rollout.replica import TokenOutput

GATHER_S = 0.05
"""How long the first request waits for others to share its forward passes."""


class Request:
    def __init__(self, prompt_ids, limit, temperature, generator, num_listed):
        self.prompt_ids = list(prompt_ids)
        self.token_ids = []
        self.logprobs = []
        self.num_listed = num_listed
        self.listed = []
        self.limit = limit
        self.temperature = temperature
        self.draws = iter(torch.rand(limit, generator=generator).tolist())
        self.done = asyncio.get_running_loop().create_future()

    @property
    def is_open(self):
        return not self.done.done()

    def finish(self, reason):
        if self.is_open:
            self.done.set_result(reason)


class Wave:
    """Requests that came together and share one key-value cache; prompts are padded on the left."""

    def __init__(self, requests):
        self.requests = requests
        width = max(len(request.prompt_ids) for request in requests)
        pads = [width - len(request.prompt_ids) for request in requests]
        self.ids = torch.tensor([[0] * pad + r.prompt_ids for pad, r in zip(pads, requests, strict=True)])
        self.mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in pads])
        self.positions = (self.mask.cumsum(1) - 1).clamp(min=0)
        self.temperatures = torch.tensor([request.temperature for request in requests])[:, None]
        self.cache = None

    @property
    def is_open(self):
        return any(request.is_open for request in self.requests)

    @torch.no_grad()
    def advance(self, model, eos):
        """One more token for each open request."""
        out = model(
            self.ids, attention_mask=self.mask, position_ids=self.positions, past_key_values=self.cache, use_cache=True
        )
        self.cache = out.past_key_values
        logprobs = torch.log_softmax(out.logits[:, -1].float() / self.temperatures, -1)
        tokens = self._draw(logprobs)
        self._list(logprobs)
        self._take(tokens, logprobs.gather(1, tokens[:, None])[:, 0], eos)
        self.ids = tokens[:, None]
        self.mask = torch.cat([self.mask, torch.ones_like(self.ids)], 1)
        self.positions = self.positions[:, -1:] + 1

    def _draw(self, logprobs):
        """One token per request, by its own next random number; 0 for those that are done."""
        below = logprobs.exp().cumsum(-1)
        draws = torch.tensor([next(request.draws) if request.is_open else 0.0 for request in self.requests])
        tokens = torch.searchsorted(below, draws[:, None] * below[:, -1:], right=True)[:, 0]
        return tokens.clamp(max=logprobs.shape[1] - 1)

    def _list(self, logprobs):
        """The most probable tokens, for those who asked: what a vLLM engine gives for logprobs=k."""
        for request, row in zip(self.requests, logprobs, strict=True):
            if request.is_open and request.num_listed:
                request.listed.append(row.topk(request.num_listed))

    def _take(self, tokens, logprobs, eos):
        for request, token, logprob in zip(self.requests, tokens.tolist(), logprobs.tolist(), strict=True):
            if not request.is_open:
                continue
            request.token_ids.append(token)
            request.logprobs.append(logprob)
            if token == eos or len(request.logprobs) >= request.limit:
                request.finish("completed")


class Engine:
    """What verl calls a rollout server. Settings: see `job.Settings`."""

    def __init__(self, model_path, response_length):
        torch.set_num_threads(1)
        dtype = getattr(torch, os.environ.get("VERL_CPU_ENGINE_DTYPE", "float32"))
        self.model = AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype, attn_implementation="eager").eval()
        self.rounds = os.environ.get("VERL_CPU_ROUND_WEIGHTS") == "1"
        self.eos = None if os.environ.get("VERL_CPU_IGNORE_EOS") == "1" else self.model.config.eos_token_id
        self.token_s = float(os.environ.get("VERL_CPU_TOKEN_S", "0"))
        self.stale_after = int(os.environ.get("VERL_CPU_STALE_AFTER", "-1"))
        self.response_length = response_length
        self.global_steps = None
        self.loaded = -1
        self.waiting = []
        self.waves = []
        self.seen = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.loop_task = None

    async def ready(self):
        return "cpuhf"

    async def set_global_steps(self, global_steps):
        self.global_steps = global_steps

    async def load(self, state, global_steps):
        """Loads weights, unless this engine is one that keeps its old ones while its label goes on."""
        if 0 <= self.stale_after < (global_steps or 0):
            return 0
        cast = {name: self._rounded(tensor).to(self.model.dtype) for name, tensor in state.items()}
        self.model.load_state_dict(cast, strict=False)
        self.loaded = global_steps
        return len(state)

    def _rounded(self, tensor):
        """An engine with 8-bit weights whose arithmetic does not depend on who shares a batch."""
        return tensor.to(torch.float8_e4m3fn) if self.rounds else tensor

    async def generate(self, request_id, prompt_ids, sampling_params, **rest):
        await self.gate.wait()
        limit = sampling_params.get("max_tokens") or sampling_params.get("max_new_tokens") or self.response_length
        num_listed = (sampling_params.get("extra_args") or {}).get(TOPK, 0)
        temperature = sampling_params.get("temperature") or 1.0
        request = Request(prompt_ids, limit, temperature, self._generator(prompt_ids), num_listed)
        version = self.global_steps
        self.waiting.append(request)
        if self.loop_task is None or self.loop_task.done():
            self.loop_task = asyncio.create_task(self._run())
        reason = await request.done
        extra_fields = {"global_steps": version, "num_cached_tokens": 0}
        if request.listed:
            ids, logprobs = (
                torch.stack([getattr(row, name) for row in request.listed]) for name in ("indices", "values")
            )
            extra_fields[TOPK] = ids.numpy(), logprobs.numpy()
        return TokenOutput(
            token_ids=request.token_ids,
            log_probs=request.logprobs,
            stop_reason=reason,
            num_preempted=0,
            extra_fields=extra_fields,
        )

    def _generator(self, prompt_ids):
        key = tuple(prompt_ids)
        self.seen[key] = self.seen.get(key, 0) + 1
        text = f"{os.environ.get('VERL_CPU_SEED', '0')}:{self.seen[key]}:{key}".encode()
        seed = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")
        return torch.Generator().manual_seed(seed)

    async def _run(self):
        await asyncio.sleep(GATHER_S)
        while self.waiting or self.waves:
            if self.waiting:
                self.waves.append(Wave(self.waiting))
                self.waiting = []
            for wave in self.waves:
                wave.advance(self.model, self.eos)
                await asyncio.sleep(self.token_s)
            self.waves = [wave for wave in self.waves if wave.is_open]

    async def abort_all_requests(self, reject_request=False):
        self.gate.clear()
        for request in (*self.waiting, *(request for wave in self.waves for request in wave.requests)):
            request.finish("aborted")
        self.waiting, self.waves = [], []
        return {}

    async def resume_generation(self):
        self.gate.set()

    async def wake_up(self, tags=None):
        return None

    async def sleep(self):
        return None

    async def clear_kv_cache(self):
        return None

    async def release_kv_cache(self):
        return None

    async def resume_kv_cache(self):
        return None

    async def start_profile(self, **rest):
        return None

    async def stop_profile(self):
        return None
