"""textarena: tic-tac-toe of the policy against itself. The reward is that of player 0; only an answer of the other one
that is no move gives it one here."""

import json
import os
import sys

import textarena as ta

sys.stdin.read()
players = [ta.agents.OpenAIAgent("policy", base_url=os.environ["OPENAI_BASE_URL"]) for _ in range(2)]
env = ta.make("TicTacToe-v0")
env.reset(num_players=2)
done = False
while not done:
    player, observation = env.get_observation()
    done, _ = env.step(action=players[player](observation))
rewards, _ = env.close()
print(json.dumps({"reward": rewards[0]}))
