"""GRPO with the DLC loss: one import and one name differ from TRL's own example. Needs a GPU with vLLM."""

from datasets import load_dataset
from dlc_sentinel.integrations.trl_dlc import DlcGRPOTrainer
from trl import GRPOConfig
from trl.rewards import accuracy_reward

dataset = load_dataset("trl-lib/DeepMath-103K", split="train")
args = GRPOConfig("out", use_vllm=True, vllm_mode="colocate", steps_per_generation=4, logging_steps=1)
trainer = DlcGRPOTrainer("Qwen/Qwen3-0.6B", accuracy_reward, args, train_dataset=dataset)
trainer.train()  # its log holds dlc/centring, dlc/weight_ess_ratio/1, dlc/clip_share, dlc/tail_mass
