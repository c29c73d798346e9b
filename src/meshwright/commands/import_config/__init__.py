"""The command `import-config`: from a config of another tool to one of this, with nothing left out silently.

import_config             reads a file, finds its format, writes the config and the table
option_rules              what becomes of an option: mapped, dropped, refused, or unknown
parallel_layout           mesh, strategies and precision, which all formats share
accelerate                Accelerate YAML
deepspeed                 DeepSpeed JSON
deepspeed_offload         offload of ZeRO to the CPU and to NVMe
deepspeed_zero_plus_plus  hpZ, qwZ and qgZ
megatron                  Megatron-LM arguments
megatron_model            the transformers config of a model that Megatron-LM's arguments describe
megatron_rules            Megatron-LM arguments that become no key
megatron_script           arguments in a shell script
torchtitan                torchtitan TOML
"""
