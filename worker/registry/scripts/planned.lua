-- Replace a job's plan by its shards. ARGV job id, token, grace ms, ms of waiting that are worth one step of priority,
-- the endpoints and the model that its lines name, the trace context of its shards (empty: the job's, if it has one),
-- then for each shard its indices, comma separated, what its first prompt begins with, and the model it is for.
local job_id, token, grace, ageing = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
if not held_under(token, PLAN) then
  -- A client that lost the reply sends the same call again.
  return redis.call('HGET', JOB, 'plan_tok') == token and 1 or 0
end
local now = now_ms()
local job = redis.call('HMGET', JOB, 'cancel', 'deadline', 'pri', 'tenant', 'n', 'v')
-- Every line has a record or is in a shard; else Redis has lost records of bad lines, and the plan is made again.
local num_lines = redis.call('HLEN', RES)
for i = 8, #ARGV, 3 do
  local _, commas = string.gsub(ARGV[i], ',', ',')
  num_lines = num_lines + commas + 1
end
if num_lines ~= tonumber(job[5]) then
  requeue(job_id .. '/plan', now, now)
  return -1
end
local look = next_look(now, grace, job[2])
if job[1] ~= '0' then look = now end
local num_shards = 0
for i = 8, #ARGV, 3 do
  local _, commas = string.gsub(ARGV[i], ',', ',')
  local shard = {idx = ARGV[i], n = commas + 1, att = 0, first = now, lane = job[3], head = ARGV[i + 1]}
  shard.turn, shard.tenant, shard.model = now + job[3] * ageing, job[4], ARGV[i + 2]
  if shard.model == '' then shard.model = nil end
  queue_shard(job_id, num_shards, shard, now, look)
  count_open(shard.model, 1)
  num_shards = num_shards + 1
end
-- A worker that does not know version 3 would run a shard on whatever model it serves.
redis.call('HSET', JOB, 'v', math.max(job[6] or 3, 3), 'st', 'running', 'started', now, 'ns', num_shards, 'sd', 0, 'plan_tok', token,
  'urls', ARGV[5], 'model', ARGV[6])
if ARGV[7] ~= '' then redis.call('HSET', JOB, 'trace', ARGV[7]) end
redis.call('UNLINK', PLAN)
redis.call('ZREM', OPEN, job_id .. '/plan')
return 1
