-- A page of a job's records; changes nothing. KEYS job, res, ord. ARGV: order, cursor, most records, most bytes.
-- Returns nothing for what is forgotten, else: how many places after the cursor are passed (records written, or lines in
-- input order), whether every record so far is read, whether the job has ended, and the records.
local JOB, RES, ORD = KEYS[1], KEYS[2], KEYS[3]
local by_line, cursor, most_records, most_bytes = ARGV[1] == 'input', tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local state, lines, ok, err = unpack(redis.call('HMGET', JOB, 'st', 'n', 'ok', 'err'))
if not state then return false end
local has_ended = state ~= 'queued' and state ~= 'running'
local num_lines, num_records = tonumber(lines), ok + err

local places, is_last = {}, true
if not by_line then
  places = redis.call('LRANGE', ORD, ARGV[2], string.format('%.0f', cursor + most_records - 1))
  is_last = #places < most_records
elseif num_records > 0 then
  for line = cursor, math.min(cursor + most_records, num_lines) - 1 do places[#places + 1] = line end
  is_last = cursor + #places >= num_lines
end

local records, bytes, passed = {}, 0, 0
for _, index in ipairs(places) do
  -- Not HSTRLEN first: a call more for each record, where this way one record a page is read in vain.
  local record = redis.call('HGET', RES, index)
  if record then
    bytes = bytes + #record
    if bytes > most_bytes and #records > 0 then
      is_last = false
      break
    end
    records[#records + 1] = record
  elseif by_line and not has_ended then
    is_last = true
    break
  elseif not by_line or num_records == num_lines then
    return false -- the hash expired before the others
  end
  passed = passed + 1
end
return {passed, is_last and 1 or 0, has_ended and 1 or 0, records}
