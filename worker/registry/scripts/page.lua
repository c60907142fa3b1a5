-- A page of a job's records; changes nothing. KEYS job, res, ord. ARGV: order, cursor, the index that stood before the
-- cursor (completion order; empty: whichever), most records, most bytes.
-- Returns nothing for what is forgotten; 'rewound' where another index stands there, or none: Redis has lost records that
-- were read; 'lost', records counted, records left, places left in the order where they do not agree; else 'page', how
-- many places after the cursor are passed (records written, or lines in input order), whether every record so far is
-- read, whether the job has ended, how many places there are in all, whether its deadline has passed before its end, the
-- indices of the records, and the records.
local JOB, RES, ORD = KEYS[1], KEYS[2], KEYS[3]
local MOST_RECORDS = 10000 -- whatever is asked for, and whatever number of lines stands in the job: bounds the script's time
local by_line, cursor, last = ARGV[1] == 'input', tonumber(ARGV[2]), ARGV[3]
local most_records, most_bytes = math.min(tonumber(ARGV[4]), MOST_RECORDS), tonumber(ARGV[5])
local state, lines, ok, err, fin, retain, deadline =
  unpack(redis.call('HMGET', JOB, 'st', 'n', 'ok', 'err', 'fin', 'retain', 'deadline'))
if not state then return false end
local now = now_ms()
local has_ended = not is_open(state)
local num_lines, num_records = tonumber(lines), ok + err
local num_written, num_ordered = redis.call('HLEN', RES), redis.call('LLEN', ORD)

-- Both are written by one script, so they agree unless a key was evicted or lost. In its last second a job's keys may
-- expire one before the other.
if num_written < num_records or (not by_line and num_ordered ~= num_written) then
  if has_ended and now >= fin + retain - 1000 then return false end
  return {'lost', num_records, num_written, num_ordered}
end

local places, is_last = {}, true
if not by_line then
  local first = last == '' and cursor or cursor - 1
  places = redis.call('LRANGE', ORD, string.format('%.0f', first), string.format('%.0f', cursor + most_records - 1))
  if last ~= '' and table.remove(places, 1) ~= last then return {'rewound'} end
  is_last = #places < most_records
elseif num_records > 0 then
  for line = cursor, math.min(cursor + most_records, num_lines) - 1 do places[#places + 1] = line end
  is_last = cursor + #places >= num_lines
end

local indices, records, bytes, passed = {}, {}, 0, 0
for _, index in ipairs(places) do
  -- Not HSTRLEN first: a call more for each record, where this way one record a page is read in vain.
  local record = redis.call('HGET', RES, index)
  if record then
    bytes = bytes + #record
    if bytes > most_bytes and #records > 0 then
      is_last = false
      break
    end
    indices[#indices + 1], records[#records + 1] = index, record
  elseif not by_line then
    return {'lost', num_records, num_written, num_ordered}
  elseif not has_ended then
    is_last = true
    break
  end
  passed = passed + 1
end
local num_places = by_line and num_records > 0 and num_lines or num_records
local is_overdue = not has_ended and deadline ~= '0' and tonumber(deadline) <= now
return {'page', passed, is_last and 1 or 0, has_ended and 1 or 0, num_places, is_overdue and 1 or 0, indices, records}
